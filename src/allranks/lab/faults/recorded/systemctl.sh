#!/bin/sh
# The lab's systemctl: answers for nvidia-fabricmanager from the file beside it, else the machine's own answers.
here=$(dirname "$0")
case "$*" in
  *is-active*nvidia-fabricmanager*)
    state=$(cat "$here/fabric_manager_state")
    echo "$state"
    [ "$state" = active ]
    exit $(($? * 3)) ;;
esac
PATH=$(printf %s "$PATH" | tr : '\n' | grep -vxF "$here" | paste -sd:)
command -v systemctl >/dev/null || { echo "systemctl: not installed" >&2; exit 127; }
exec systemctl "$@"
