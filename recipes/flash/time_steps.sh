# A row of FLASH's Table 11 on one GPU: tokens of a step, over wps in the log, are its seconds. Architecture, its options
#   sh recipes/flash/time_steps.sh performer_lm_base --flash-cumulative-sum matmul
set -e
[ -f work/flash/wiki40b/text.json ] || python -m recipes.flash.data wiki40b
for shape in "512 4" "1024 2" "2048 1" "4096 1"; do
  fairseq-train work/flash/wiki40b/data-bin --user-dir fairseq_plugin --task language_modeling --arch "$@" \
    --tokens-per-sample ${shape% *} --sample-break-mode none --batch-size ${shape#* } --max-update 100 --no-save \
    --disable-validation --optimizer adam --adam-betas '(0.9, 0.999)' --adam-eps 1e-06 --weight-decay 0.01 \
    --clip-norm 0.1 --lr 0.0007 --log-format json --log-interval 10
done
