"""Tests of the lab. A package, so that its conftest is not taken for the one above."""
