"""Imported once by the fork server, so that every worker starts with TVM loaded."""

from __future__ import annotations

import tvm.driver
import tvm.s_tir.meta_schedule
import tvm.s_tir.transform  # noqa: F401

from ansor_mlflow.device import import_tensor_intrin

import_tensor_intrin("llvm")
