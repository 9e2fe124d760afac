// SPDX-License-Identifier: Apache-2.0

package metrics

import (
	"context"
	"errors"
	"net/url"
)

// Failure is why a page was not read, of a closed list that can be a label.
type Failure uint8

const (
	// NoFailure is that of a good scrape.
	NoFailure Failure = iota
	// Unreachable: no connection, no TLS, a redirect elsewhere, no answer in HTTP.
	Unreachable
	// TimedOut: no whole page in time, however much of it came.
	TimedOut
	// WrongStatus: an answer with another status than 200.
	WrongStatus
	// NoEngine: a page without metrics of any known engine.
	NoEngine
	// TooLarge: a page of more bytes or ranks than one replica's has.
	TooLarge
	// Unreadable: a page that was cut short, or is encoded in a way that is not
	// understood.
	Unreadable
	failures
)

var failureNames = [failures]string{"", "unreachable", "timeout", "status", "no_engine", "too_large", "unreadable"}

func (f Failure) String() string {
	if f >= failures {
		return "unknown"
	}
	return failureNames[f]
}

// FailureCounts counts scrapes by their failure.
type FailureCounts [failures]uint64

// FailureOf tells the kind of the error of a [Scrape].
func FailureOf(err error) Failure {
	var status *StatusError
	var call *url.Error
	switch {
	case err == nil:
		return NoFailure
	case errors.Is(err, context.DeadlineExceeded):
		return TimedOut
	case errors.As(err, &status):
		return WrongStatus
	case errors.Is(err, ErrNoEngine):
		return NoEngine
	case errors.Is(err, ErrTooLarge), errors.Is(err, ErrTooManyRanks):
		return TooLarge
	case errors.As(err, &call): // of the client: what comes later is read from the body
		return Unreachable
	}
	return Unreadable
}
