"""The tables of the first release, as `ucformat.catalog.models` describes them; later revisions change these."""

revision = "1"
down_revision = None
branch_labels = None
depends_on = None
