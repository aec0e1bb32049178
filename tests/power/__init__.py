"""The power fails under each command of ucformat, after each of its calls, and what is found then must be right.

`recorder.py` notes what a command does to files, call by call: it stands in place of the functions
of `os` that change anything, and what it noted, done again, must give the very files that there
are, so that no call escapes it. `disk.py` says what a disk may hold when the power fails after some
of these calls. Its model is POSIX taken at its word:

- What a file holds is durable when it was synced itself. Until then it may be what it was before,
  zeros, a part, or all.
- A name in a folder (made, linked, renamed, removed) is durable when that folder was synced: a new
  folder is found only if the one above it was synced, too. A rename happens as a whole or not at
  all.
- Between two syncs nothing has an order: what is done to one file or folder may last without what
  was done before to another, or to the same folder.

ext4, XFS and Btrfs promise more (names last in their order, and mostly along with the file that was
synced), so what holds here holds there. Of what was not synced, all states are tried in which
nothing of it lasts; everything; the names without contents, these being empty, zeros or half;
contents without names; each call alone; all but each one; each file's content alone, and missing
alone. States in which the same is visible are looked at once.

In each of them (`failure.py`) all checkpoints that were committed are there, bit for bit, and what
the command makes is there as a whole, or not at all; when the command has returned, it is there.
Repeated, the command succeeds, or says that it is done. After `gc`, nothing is left that belongs to
nothing. Besides, a command is killed at each call and repeated, and then the power fails: the
second one must not take for durable what the first one left. And each sync is made to do nothing,
as some disks do: then reading must be an error, or right.

The catalog is not on this disk: it is SQLite's own to keep, and found as it was at that instant.

    python -m tests.power                        all commands, with counts
    python -m tests.power delete overwrite       these
"""
