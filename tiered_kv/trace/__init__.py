"""The trace: what happened to every turn, as files of JSON lines."""
