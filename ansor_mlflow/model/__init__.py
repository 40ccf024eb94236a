"""A tuned model as a directory of libraries, records and the network, with the digest of every file."""

from ansor_mlflow.model.package import LIBRARY_FILE, CompiledNetwork, LibraryEntry, Manifest, write_package
from ansor_mlflow.model.tuned import TunedModel, choose_library, load_package, open_library

__all__ = [
    "LIBRARY_FILE",
    "CompiledNetwork",
    "LibraryEntry",
    "Manifest",
    "TunedModel",
    "choose_library",
    "load_package",
    "open_library",
    "write_package",
]
