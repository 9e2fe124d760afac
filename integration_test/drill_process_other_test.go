//go:build !unix

// SPDX-License-Identifier: Apache-2.0

package integration

// processes are drills with signals and limits that this system does not have.
var processes []drill
