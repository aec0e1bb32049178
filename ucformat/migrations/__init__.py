"""The one alembic chain of the catalog: the room is kept, its revisions come with the catalog itself."""
