// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"fmt"
	"slices"
	"strings"

	"github.com/caddyserver/caddy/v2"
)

const policyNamespace = "http.reverse_proxy.selection_policies"

// Policy is a load-balancing policy of Caddy's reverse_proxy.
type Policy struct {
	// Name is what stands after lb_policy in a Caddyfile: the policy's name and
	// its arguments, if it takes any.
	Name string
	// Options is what stands in the policy's block; empty is no block.
	Options string
}

// DefaultPolicies are those that a demo compares, in this order: Caddy's own
// that people use for LLM servers, then ours.
func DefaultPolicies() []string {
	return []string{"round_robin", "least_conn", "prefix_hash", "kv_cache_aware"}
}

// KnownPolicies returns the names of all policies in this binary, sorted.
func KnownPolicies() []string {
	var names []string
	for _, m := range caddy.GetModules(policyNamespace) {
		names = append(names, m.ID.Name())
	}
	slices.Sort(names)
	return names
}

// ParsePolicies makes policies of their names, with arguments if any, and of
// options of the form policy=text, where text is a line or more of the policy's
// block.
func ParsePolicies(names, options []string) ([]Policy, error) {
	known := KnownPolicies()
	policies := make([]Policy, 0, len(names))
	for _, name := range names {
		words := strings.Fields(name)
		if len(words) == 0 {
			return nil, fmt.Errorf("a policy's name is empty")
		}
		if !slices.Contains(known, words[0]) {
			return nil, fmt.Errorf("unknown policy %q; known are %s", words[0], strings.Join(known, ", "))
		}
		policies = append(policies, Policy{Name: strings.Join(words, " ")})
	}
	if len(policies) == 0 {
		return nil, fmt.Errorf("no policy to play")
	}
	for _, option := range options {
		name, text, found := strings.Cut(option, "=")
		if !found || strings.TrimSpace(text) == "" {
			return nil, fmt.Errorf("option %q is not of the form policy=text", option)
		}
		if err := addOption(policies, name, strings.TrimSpace(text)); err != nil {
			return nil, err
		}
	}
	return policies, nil
}

func addOption(policies []Policy, name, text string) error {
	found := false
	for i := range policies {
		if policies[i].id() != name {
			continue
		}
		found = true
		if policies[i].Options != "" {
			text = policies[i].Options + "\n" + text
		}
		policies[i].Options = text
	}
	if !found {
		return fmt.Errorf("option for %q, which is not among the policies to play", name)
	}
	return nil
}

// polls tells whether the policy polls the replicas.
func (p Policy) polls() bool { return p.id() == "kv_cache_aware" }

// ours tells whether the policy is of this plugin, and so gives reasons.
func (p Policy) ours() bool { return p.polls() || p.id() == "prefix_hash" }

// id is the name without arguments.
func (p Policy) id() string {
	id, _, _ := strings.Cut(p.Name, " ")
	return id
}
