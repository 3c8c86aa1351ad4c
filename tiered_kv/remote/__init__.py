"""Remote stores: values by key in a store that many machines share. `base` is the contract."""
