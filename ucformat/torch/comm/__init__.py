"""The transport between the ranks of one save or load: connections of our own, a tree over them, and messages.

It stays beside `torch.distributed` for three reasons. It names the rank that died or does not answer. It
authenticates peers before any of their bytes are interpreted. And it serves threads: several saves and
loads at once, in an order of their own on each rank, while the process groups of the training are busy
([ADR 0016](docs/adr/0016-communication-between-ranks.md)). It has what saving and loading use, and no more: a merge
up the tree with an answer down (`Group.combine`, `Group.gather_scatter`), and bulk data from rank to rank.
"""
