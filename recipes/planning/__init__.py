"""Plan a training before it starts: memory, throughput, hardware fit, parallel layout. Free of torch."""
