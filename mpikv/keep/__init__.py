"""Commits: copies of a training's state in files that outlive its ranks, and the way back to the newest one.

At the end of a step of :meth:`mpikv.KVStore.steps`, each rank copies what it owns of the store, and what the program
keeps, into one of its two files in a folder of ``mpikv run``. After a death all ranks start again, and go on from the
newest commit that all of them have.

``folder`` is what the launcher sees, ``slots`` has the files of a rank, ``state`` turns the program's objects into JSON
and arrays, ``contents`` knows what of a store is kept, and ``commits`` makes the collective calls. The package imports
``engine``, ``checkpoint`` and ``verbs``. Pushes and pulls know nothing of it.
"""
