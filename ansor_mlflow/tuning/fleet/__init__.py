"""Fleets: candidates measured on other machines, through TVM's RPC tracker."""
