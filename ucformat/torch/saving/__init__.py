"""`save` and `async_save`: plan, write and commit what the ranks of a training hold."""
