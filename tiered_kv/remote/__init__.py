"""Remote stores: values by key in a place that many machines share. `base` is the contract."""
