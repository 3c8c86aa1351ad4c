"""KV hints on a real server: every intent by every transport, their effects, and abuse."""
