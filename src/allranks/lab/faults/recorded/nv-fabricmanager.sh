#!/bin/sh
# The lab's nv-fabricmanager: says its version.
[ "$1" = --version ] || [ "$1" = -v ] || { echo "the lab's nv-fabricmanager knows --version only" >&2; exit 2; }
echo "Fabric Manager version is : $(cat "$(dirname "$0")/fabric_manager_version")"
