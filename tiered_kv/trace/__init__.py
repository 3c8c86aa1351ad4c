"""The trace: a record of every turn, as files of JSON lines."""
