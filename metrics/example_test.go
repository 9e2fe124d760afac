// SPDX-License-Identifier: Apache-2.0

package metrics_test

import (
	"fmt"
	"strings"

	"github.com/seed-2fa47a1e/caddy-kv-cache/metrics"
)

func ExampleScanner() {
	page := `
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{model_name="qwen",tp_rank="0"} 4.0
# TYPE sglang:token_usage gauge
sglang:token_usage{model_name="qwen",tp_rank="0"} 0.28
`
	var scanner metrics.Scanner
	var snapshot metrics.Snapshot
	if err := scanner.Scan(strings.NewReader(page), &snapshot); err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(snapshot.Engine, snapshot.Running.Value, snapshot.KVUsage.Value)
	fmt.Println("waiting known:", snapshot.Waiting.Known)
	// Output:
	// sglang 4 0.28
	// waiting known: false
}
