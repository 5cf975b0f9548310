#!/bin/sh
# launch.sh FIFO COMMAND...: a launcher as people write them. A check that reads a pipe for CHECK_S (3) seconds; a search
# in a file that says nothing, whose failure nobody sees; then the job. Says "here" and waits for a line first, then how
# long both took, in ns.
fifo=$1
shift
echo here
read -r _
begin=$(date +%s%N)
answer=$(sh -c "sleep ${CHECK_S:-3}; echo ok" | cat)
middle=$(date +%s%N)
echo "searching $answer"
grep -q ready "$fifo" 2>/dev/null || true
echo "took $((middle - begin)) $(($(date +%s%N) - middle))"
exec "$@"
