#!/usr/bin/env bash
# Three experts of the demo's task from one base, merged by their task vectors, each policy measured in each domain.
#   examples/domains/domains.sh [FOLDER]      STEPS=60 SEED=0; the default folder is runs/domains
set -euo pipefail

folder=${1:-runs/domains}
steps=${STEPS:-60}
seed=${SEED:-0}
sets="env.args.operators='+-*'"

penstock sft experiment=arithmetic_sft seed="$seed" name=base run_dir="$folder/base" "$sets" \
    overwrite=true sft.reuse=true

expert() { # name, operator
    penstock train experiment=arithmetic seed="$seed" name="$1" run_dir="$folder/$1" total_steps="$steps" \
        model.path="$folder/base/policy" "env.args.operators='$2'" resume=auto
}
expert add "+"
expert subtract "-"
expert multiply "*"

merged() { # folder, coefficient, further options
    penstock merge "$folder/add" "$folder/subtract" "$folder/multiply" --base "$folder/base" \
        --coefficients "$2,$2,$2" --to "$folder/$1" "${@:3}"
}
rm -rf "$folder"/merged-*
merged merged-mean 0.3333
merged merged-sum 1
merged merged-ties 1 --method ties --density 0.2
merged merged-dare 0.3333 --method dare --density 0.5

rm -f "$folder/figures.jsonl"
for policy in base/policy {add,subtract,multiply}/policy merged-mean merged-sum merged-ties merged-dare; do
    penstock eval experiment=arithmetic model.path="$folder/$policy" "$sets" evaluation.num_tasks=1500 |
        tail -n 1 >> "$folder/figures.jsonl"
done
python "$(dirname "$0")/table.py" "$folder/figures.jsonl"
