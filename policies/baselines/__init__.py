"""Published policies, implemented for comparison."""
