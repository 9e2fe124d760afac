// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"time"
)

func inOwnGroup(cmd *exec.Cmd) { cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} }

// endGroup ends the process and those that it started.
func endGroup(cmd *exec.Cmd) {
	_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM)
	time.AfterFunc(5*time.Second, func() { _ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) })
}

// usage is what a process group has used so far.
type usage struct {
	cpu  time.Duration
	peak int // largest resident memory of each process, summed, in bytes
}

const clockTick = 10 * time.Millisecond // USER_HZ is 100 on every Linux that Go runs on

// usageOf reads the group's figures from /proc.
func usageOf(group int) (u usage) {
	stats, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, path := range stats {
		text, err := os.ReadFile(path)
		if err != nil {
			continue // it ended
		}
		// The name, in parentheses, may hold anything.
		fields := bytes.Fields(text[bytes.LastIndexByte(text, ')')+1:])
		if len(fields) < 15 || number(fields[2]) != group {
			continue
		}
		u.cpu += time.Duration(number(fields[11])+number(fields[12])) * clockTick
		status, err := os.ReadFile(filepath.Join(filepath.Dir(path), "status"))
		if err != nil {
			continue
		}
		if _, line, ok := bytes.Cut(status, []byte("VmHWM:")); ok {
			u.peak += number(bytes.Fields(line)[0]) << 10
		}
	}
	return u
}

func number(b []byte) int {
	n, _ := strconv.Atoi(string(b)) // the kernel's own
	return n
}
