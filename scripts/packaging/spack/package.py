"""A recipe for Spack. In a copy of the repository, with the folder of this file as ``packages/py_mpikv`` of a repo:

    spack develop --path "$PWD" py-mpikv@main && spack install py-mpikv ^[virtuals=mpi] cray-mpich

A release gets a ``version`` with the sha256 of its source archive.
"""

from spack.package import depends_on, license, version
from spack_repo.builtin.build_systems.python import PythonPackage


class PyMpikv(PythonPackage):
    """A KVStore for distributed training over MPI: init, push, pull and an updater, by MXNet's contract."""

    license("Apache-2.0", checked_by="the authors of mpikv")

    version("main", branch="main")

    depends_on("python@3.10:", type=("build", "run"))
    depends_on("py-setuptools@77:", type="build")
    depends_on("py-numpy@1.26:", type=("build", "run"))
    # It is built with the MPI of the site, and no wheel of an MPI library is installed.
    depends_on("py-mpi4py@4.1:", type=("build", "run"))
    depends_on("mpi", type="run")
