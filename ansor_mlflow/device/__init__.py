"""Devices: targets, threads, and the fingerprints that tell one device from another."""

from ansor_mlflow.device.cpu import (
    CPU,
    TILES_REQUEST,
    WEIGHT_BITS,
    cpu_features,
    has_arithmetic,
    has_dot_products,
    has_matrix_tiles,
    has_pair_products,
    host_attributes,
    missing_instructions,
    vector_lanes,
    weight_bits,
)
from ansor_mlflow.device.cuda import CUDA, architecture_here, describe_gpus, why_no_compiler, why_no_gpu, why_not_on_gpu
from ansor_mlflow.device.device import Device, DeviceFingerprint, fingerprint, why_not_runnable
from ansor_mlflow.device.pages import HugePages, NewMemory, return_freed_memory, try_huge_pages
from ansor_mlflow.device.platform import Platform, attributes_of
from ansor_mlflow.device.targets import (
    PLATFORMS,
    import_tensor_intrin,
    machine_of,
    parse_target,
    platform_of,
    resolve_target,
)
from ansor_mlflow.device.threads import (
    available_cpus,
    cpu_quota,
    has_num_threads,
    measuring_cpus,
    memory_left,
    resolve_num_threads,
    set_num_threads,
)
