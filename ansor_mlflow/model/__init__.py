"""A tuned model as a directory of libraries, records and the network, with the digest of every file."""

from ansor_mlflow.model.building import (
    BuildJob,
    build,
    build_in_child_process,
    build_pool,
    fallback_among,
    guarded,
    lower_guarded,
)
from ansor_mlflow.model.choice import Choice, LoadOptions, choose_for_server, choose_library, threads_here
from ansor_mlflow.model.library import (
    Coverage,
    compile_tuned,
    compile_untuned,
    database_of,
    require_linker,
)
from ansor_mlflow.model.loading import load_package, open_library
from ansor_mlflow.model.manifest import LIBRARY_FILE, LibraryEntry, Manifest, verified_manifest
from ansor_mlflow.model.package import CompiledNetwork, read_package, with_libraries, write_package
from ansor_mlflow.model.parts import (
    EXPORTED_KINDS,
    RUNTIME_TITLES,
    PartEntry,
    PartRunner,
    computed_by,
    fallback_clauses,
    has_library,
    part_entries,
    timed_parts,
    write_all_parts,
)
from ansor_mlflow.model.sessions import OpenVinoSession, open_sessions
from ansor_mlflow.model.tuned_model import TunedModel, describe_sizes, require_pad
from ansor_mlflow.model.virtual_machines import load_runtime_alone
