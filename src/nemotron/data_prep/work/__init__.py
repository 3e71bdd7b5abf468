"""Long work that can be killed: shards with receipts, engines that run their tasks, progress."""
