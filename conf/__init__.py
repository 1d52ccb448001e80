"""Hydra config groups. This folder is a package only so that Hydra finds it as `pkg://penstock.conf`."""
