"""States and other models that only tests need; their tables are made without migrations."""
