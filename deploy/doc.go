// SPDX-License-Identifier: Apache-2.0

// Package deploy holds no code: a Grafana dashboard, Prometheus alerts and
// set-ups for compose, systemd and Kubernetes, and the tests that keep them
// true to the metrics.
package deploy
