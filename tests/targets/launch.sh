#!/bin/sh
# launch.sh FIFO COMMAND...: a launcher as people write them. A check that reads a pipe for 3 s; a search in a file that
# never comes, whose failure nobody sees; then the job. Says "here" and waits for a line first.
fifo=$1
shift
echo here
read -r _
answer=$(sh -c 'sleep 3; echo ok' | cat)
echo "searching $answer"
grep -q ready "$fifo" 2>/dev/null || true
exec "$@"
