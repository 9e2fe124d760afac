// SPDX-License-Identifier: Apache-2.0

package capture

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"encoding/base64"
	"encoding/binary"
)

// secret is the key that a file's hashes are made with. It is kept in memory
// only and never written, so that nobody who reads the file can test a guess at
// the text: that takes the key, and it is gone with the process.
type secret struct {
	name  string
	block cipher.Block
	in    [aes.BlockSize]byte
	out   [aes.BlockSize]byte
	raw   []byte
}

func newSecret() *secret {
	var key [16]byte
	var name [saltBytes]byte
	// crypto/rand never fails: it ends the process where there is no randomness.
	_, _ = rand.Read(key[:])
	_, _ = rand.Read(name[:])
	block, err := aes.NewCipher(key[:])
	if err != nil { // only for a key of another length
		panic(err)
	}
	return &secret{name: base64.RawURLEncoding.EncodeToString(name[:]), block: block}
}

// blocks writes down a chain of block hashes. AES is a pseudorandom function of
// the hash: all that its cut-off output shows is which blocks are equal.
func (s *secret) blocks(chain []uint64) string {
	s.raw = s.raw[:0]
	for _, h := range chain {
		binary.LittleEndian.PutUint64(s.in[:], h)
		s.block.Encrypt(s.out[:], s.in[:])
		s.raw = append(s.raw, s.out[:hashBytes]...)
	}
	return base64.StdEncoding.EncodeToString(s.raw)
}
