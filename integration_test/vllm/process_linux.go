// SPDX-License-Identifier: Apache-2.0

package vllm

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"time"
)

// supported says whether there are vLLM wheels for this platform.
const supported = runtime.GOARCH == "amd64"

// process is one replica: an API server and the engine it started, in a process
// group of their own.
type process struct {
	cmd *exec.Cmd
	// stdin stays open as long as the replica shall live. When this program dies
	// without stopping it, the pipe closes and run.sh ends the group.
	stdin io.Closer
	done  chan struct{} // closed when the API server has ended
	// stopped is set once the group is gone for good and its number may be in use
	// by others.
	stopped bool
}

func startProcess(cmd *exec.Cmd, logFile string) (*process, error) {
	log, err := os.OpenFile(logFile, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o644)
	if err != nil {
		return nil, err
	}
	defer log.Close() // the child has its own descriptor
	stdin, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	p := &process{cmd: cmd, stdin: stdin, done: make(chan struct{})}
	go func() {
		defer close(p.done)
		_ = cmd.Wait() // how it ended is no news: replicas are killed on purpose
	}()
	return p, nil
}

// signal sends sig to the whole group; a group that is gone is no error. Until
// stop, run.sh's watch on stdin keeps the group's number from being used again.
func (p *process) signal(sig syscall.Signal) error {
	if p.stopped {
		return nil
	}
	if err := syscall.Kill(-p.cmd.Process.Pid, sig); err != nil && !errors.Is(err, syscall.ESRCH) {
		return fmt.Errorf("send %v to process group %d: %w", sig, p.cmd.Process.Pid, err)
	}
	return nil
}

// stop ends the API server, which ends its engine, within timeout; then it kills
// what is left of the group.
func (p *process) stop(timeout time.Duration) error {
	select {
	case <-p.done:
	default:
		_ = p.cmd.Process.Signal(syscall.SIGTERM) // fails only when it has just ended
		_ = p.signal(syscall.SIGCONT)             // a stopped process would not act on it
		select {
		case <-p.done:
		case <-time.After(timeout):
		}
	}
	err := p.signal(syscall.SIGKILL)
	p.stopped = true
	<-p.done
	_ = p.stdin.Close()
	return err
}
