//go:build unix

// SPDX-License-Identifier: Apache-2.0

package fleet

import (
	"errors"
	"syscall"
)

// noneLeft opens a file, and tells whether that fails for want of descriptors,
// this process's or the system's.
func noneLeft() bool {
	fd, err := syscall.Open("/dev/null", syscall.O_RDONLY|syscall.O_CLOEXEC, 0)
	if err != nil {
		return errors.Is(err, syscall.EMFILE) || errors.Is(err, syscall.ENFILE)
	}
	_ = syscall.Close(fd) // of a file that is only read
	return false
}
