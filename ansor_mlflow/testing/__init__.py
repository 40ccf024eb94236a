"""Stand-ins for slow parts, to test what is built around them: they keep the contracts of the real ones."""

from ansor_mlflow.testing.fakes import FakeBuilder, FakeRunner

__all__ = ["FakeBuilder", "FakeRunner"]
