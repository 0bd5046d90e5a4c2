# A row of FLASH's Table 4 on 8 GPUs: pretraining on Wikipedia, then fine-tuning; architecture, its options
#   sh recipes/triviaqa/train.sh flash_mlm_base --flash-query-dim 512 --flash-chunk-size 128 --flash-first-softmax
set -e
folder=checkpoints/triviaqa/$(echo "$*" | sed 's/ --/./g; s/ /_/g') clip=0.1
case $1 in flash_mlm*) clip=0.0 ;; esac  # the paper does not clip in FLASH's fine-tuning
model=$1; shift
[ -f work/flash/wiki40b/text.json ] || python -m recipes.flash.data wiki40b
[ -d work/triviaqa/wikipedia/data-bin ] ||
  python -m recipes.triviaqa.data wikipedia --file triviaqa-rc --subwords work/flash/wiki40b
adam="--optimizer adam --adam-eps 1e-06 --weight-decay 0.01 --lr-scheduler polynomial_decay --end-learning-rate 0"
fairseq-train work/flash/wiki40b/data-bin --user-dir fairseq_plugin --task masked_lm --criterion masked_lm \
  --arch $model --tokens-per-sample 4096 --sample-break-mode none --max-tokens 8192 --update-freq 4 $adam \
  --adam-betas '(0.9, 0.999)' --max-update 125000 --clip-norm 0.1 --lr 0.0007 --warmup-updates 10000 \
  --total-num-update 125000 "$@" --save-dir $folder/pretrained
for lr in 1e-05 3e-05 5e-05; do
  fairseq-train work/triviaqa/wikipedia/data-bin --user-dir fairseq_plugin --task span_extraction \
    --criterion span_extraction --arch $model --restore-file $folder/pretrained/checkpoint_best.pt --reset-optimizer \
    --reset-dataloader --reset-meters --reset-lr-scheduler --max-positions 4096 --batch-size 2 --update-freq 2 \
    --required-batch-size-multiple 1 $adam --adam-betas '(0.9, 0.999)' --max-update 20000 --clip-norm $clip --lr $lr \
    --warmup-updates 2000 --total-num-update 20000 --validate-interval-updates 2000 --find-unused-parameters \
    --no-epoch-checkpoints --best-checkpoint-metric f1 --maximize-best-checkpoint-metric "$@" \
    --save-dir $folder/$lr
done
python -m recipes.triviaqa.answer $folder/1e-05/checkpoint_best.pt $folder/3e-05/checkpoint_best.pt \
  $folder/5e-05/checkpoint_best.pt --data work/triviaqa/wikipedia/data-bin --output $folder/answers.json
python -m recipes.triviaqa.evaluate $folder/answers.json --file triviaqa-rc/qa/wikipedia-dev.json
