"""Memory ends at each allocation of the commands that read, and what comes of it must be right, or say so.

A command runs once for each of its allocations, in a fork of its own, and there this one fails: one
of Python's (of objects, containers, buffers: `_testcapi.set_nomemory` of CPython), or one of
NumPy's, for the elements of an array (`allocations.py`). All others succeed, so that whoever takes
the failure for something else goes on as if nothing had been. The thread pools do their work at
once, in the thread that asks, so that the n-th allocation is the same each time.

The command must then do what it does always, to the bit, or end with a MemoryError, or with an
error of ours that names the memory, and is not one of damage. A conversion is committed as a whole,
or not at all, and done again it is whole. Wrong is also what does not end.

Counted apart is what dies below Python: where CPython, NumPy or a library in Rust loses the
MemoryError. It ends as a signal, a panic, or an exception of the interpreter's that nobody would
take for a result: a `SystemError`, a `TypeError` of a path that is one, a `RuntimeError` of a lock
that cannot be made. An error of ours is so counted where it was made of such an exception. What
threads add is not looked at: where memory ends within Python's own `ThreadPoolExecutor`, a thread
dies that others wait for.

    python -m tests.memory                            all commands, with counts (hours)
    python -m tests.memory 'torch convert' 'arrays'   these
    python -m tests.memory --every 50                 every fiftieth allocation of Python's
"""
