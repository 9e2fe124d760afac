// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package vllm

import (
	"errors"
	"os/exec"
	"syscall"
	"time"
)

// supported says whether there are vLLM wheels for this platform.
const supported = false

// process stands in for a replica where none can be started.
type process struct {
	done chan struct{}
}

func startProcess(*exec.Cmd, string) (*process, error) { return nil, errors.ErrUnsupported }

func (*process) signal(syscall.Signal) error { return errors.ErrUnsupported }

func (*process) stop(time.Duration) error { return errors.ErrUnsupported }
