"""Client for servers that speak the Redis protocol: Valkey, Redis and others."""
