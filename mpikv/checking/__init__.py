"""Communicators of mpi4py whose ranks compare their calls.

``checked`` returns one (``intracomm``), and ``check_world`` makes ``MPI.COMM_WORLD`` one, for ``mpikv run --check``
(``rebinding``). A call is described in words (``facts``) and compared as a number (``tickets``) by the agreement of the
stores (``check``). MPI moves the data. mpi4py is loaded once a program has a communicator.
"""
