// SPDX-License-Identifier: Apache-2.0

// Package trace reads recorded LLM request traffic and makes more of it up.
//
// A request can be used in two forms: as a chain of block hashes for a
// simulator ([Request.AppendBlocks]) and as an OpenAI request body for a real
// server ([Request.AppendBody]). Both keep what matters to a prefix cache: two
// requests share the leading part that they shared when they were recorded, and
// at most a few made-up words more.
//
// Traces are read with [Open]; [Workload] generates one.
package trace

import (
	"errors"
	"fmt"
	"io"
	"time"
)

// BytesPerToken is the number of prompt bytes that count as one token wherever
// only text is known, and the number of bytes written for one token where only
// a token count is known.
const BytesPerToken = 4

// DefaultOutputTokens stands in for the answer's length where a recorded
// request sets no limit to it.
const DefaultOutputTokens = 256

// Request is one recorded or generated request. Its prompt is in exactly one
// of HashIDs, Text, Messages and RawBody.
type Request struct {
	// At is the arrival time since the start of the trace.
	At time.Duration
	// Think is the time from the record before it in the same session to this
	// one; 0 for the first of a session and where there are no sessions. Recorded
	// sessions do not say when an answer ended, so their think times hold the
	// time that the answer took then.
	Think time.Duration
	// Session names the conversation; empty where the format has none.
	Session string
	// Path is the API path, such as /v1/chat/completions.
	Path string

	// InputTokens is the prompt's length: as recorded, or the prompt's bytes
	// divided by BytesPerToken, rounded up.
	InputTokens int
	// OutputTokens is the answer's length: as recorded, or the answer's bytes
	// divided by BytesPerToken, or the limit that the request sets, or
	// DefaultOutputTokens.
	OutputTokens int

	// HashIDs name the prompt's stretches of IDTokens tokens (the last may be
	// shorter, or lack an id where nothing is known of it); equal ids in equal
	// places, with equal ids before them, mean equal text.
	HashIDs []uint64
	// IDTokens is the length of these stretches; 0 means 512, as in Mooncake.
	IDTokens int
	// Text is the prompt as one text.
	Text string
	// Messages is the prompt as the JSON array of chat messages.
	Messages []byte
	// RawBody is the request body as recorded, a JSON object.
	RawBody []byte
}

// Session is a conversation: requests of which each is sent only after the one
// before it was answered. A Session is used by one goroutine at a time.
type Session struct {
	// ID names the session.
	ID string
	// Start is when its first request arrives, since the start of the trace.
	Start time.Duration
	// Len is the number of its requests.
	Len int
	// WantsAnswers tells whether Next makes use of the answer that it is given.
	WantsAnswers bool

	next func(answer []byte) (Request, error)
}

// Next returns the session's next request, and [io.EOF] after the last. answer
// is what the server replied to the request before, as the inside of a JSON
// string (still escaped, without the quotes). It is empty for the first
// request, after a failure, and where WantsAnswers is false.
func (s *Session) Next(answer []byte) (Request, error) {
	return s.next(answer)
}

// errAt puts the place of a bad record in front of what is wrong with it.
func errAt(file string, line int, err error) error {
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	return fmt.Errorf("%s:%d: %w", file, line, err)
}
