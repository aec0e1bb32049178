"""A model that is checked: commands of ucformat at once over one store, in every order that is worth trying.

What runs is the real code, not a model of it: `convert`, `save`, `copy`, `materialize`, `register`,
`delete`, `retain`, `gc`, `reindex` and the like (`commands.py` has them all, and the world that
they find). So do parts of a training and its tiers (`training.py`), in one process without
`torch.distributed`:

    experts, window, deltas     partial saves on the base `t/p`; the latter two save two, each on the one before
    replay                      saves deltas, and replays them
    cut                         saves deltas, and deletes them
    launch                      a `Manager` with tiers restores what is left, saves a step in the fast tier,
                                fills the two slower ones from it, and each removes its old step
    restore                     only restores
    fill                        fills the slowest tier from the fast one, as the thread of an earlier launch
    drop, delete-step           remove the old step of the tier between at once, or delete it in the catalog

What ranks of several nodes copy from each other is not in it (`tests/torch/tiers` has that), nor
processes that write in the background. At the end of the time after a signal, whatever copies fails
at its next read: that is `launch%eio`.

Each is an *actor*. It stops before every call to the store and before every transaction
of a catalog, and a *schedule* says who goes on, and for how many calls (`world.py`). An actor that
is killed makes no further call, as a process that is: what it held in memory is gone, the
transaction that it was in never was. Store and catalogs are in memory, ids are counted, and clocks
show what the schedule says, so a schedule comes out the same each time.

A schedule is written as it is played:

    resume:12 gc:7 !resume gc       12 calls of resume, 7 of gc, resume is killed, gc ends

    resume%eio12            the 12th call that can fail with EIO does; what else can befall an actor: `world.FAULTS`
    resume:5 resume%full    after 5 calls, at the next that writes, the disk is full, and stays so

Whoever is not killed ends, in the order of the first steps. An actor is a command; `gc@2` is one
with the second catalog, `gc@1` another one with the first (there are three), and the clock of
`gc+30` is 30 days ahead.

At the end of each schedule, and again when what was killed or failed has been repeated, and `gc`
has run when all grace is over, in both orders, this must hold (`schedule.py`):

- Whatever was committed, and no actor was to delete or replace, is there, bit for bit: a *lost* or
  *replaced* place. A virtual checkpoint is lost where the files of another are gone that it needs.
  A window, and deltas, are replayed, to the very state of their step.
- The newest step of a run with tiers is whole in one of them (*lost*). A further launch restores
  it, as it was saved, and saves a step in all tiers (*next launch*).
- What an alias, a tag or a hold of any catalog names is there: *held*.
- No manifest stands that nobody committed: *uncommitted*.
- A command fails with an error of ours (*error*), and when it is repeated, succeeds, or says that
  its work is done or cannot be done (*repeat*).
- A command that a fault befell fails, or warns, or did all that it does without (*silent*).
- `gc` succeeds (*gc*), and no file is left that belongs to nothing (*left*).

`explore.py` says which schedules are played: all of two actors with at most two switches and one
kill, but those that are known to come out as another does, any number of three actors by seed, and
each fault at each call of one. To look for what is wrong:

    python -m tests.schedules play 'virtual materialize'              every call, and what is wrong
    python -m tests.schedules pairs 'resume gc' 'gc resume'           or of all commands, without any named
    python -m tests.schedules pairs --part 3/20 --out pairs.jsonl     a part of it; what is noted is not done again
    python -m tests.schedules three 0 100000 --part 1/2 --out three-1.jsonl
    python -m tests.schedules faults resume gc                        or of all commands

The shortest schedule of a fault becomes a line of `test_schedules.py`.

`trees.py` does not interrupt one command by another, but does anything, with faults, to checkpoints
that are based on each other, and knows the bits of each (`test_trees.py`).
"""
