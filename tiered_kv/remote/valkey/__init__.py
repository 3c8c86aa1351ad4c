"""Client of servers that speak the Redis protocol: Valkey, Redis and others."""
