//go:build !unix

// SPDX-License-Identifier: Apache-2.0

package fleet

// noneLeft is for systems that limit descriptors.
func noneLeft() bool { return false }
