# A row of FLASH's tables on 8 GPUs, 2^18 tokens an update, evaluated after the last one as in the paper: corpus, lengths
# in quotes, architecture, its options. Models of C4 are masked (NAME_mlm); pg19 prints tokens a word at last.
#   sh recipes/flash/train.sh wiki40b "512 1024 2048 4096 8192" flash_lm_base --flash-kernel softmax
set -e
corpus=$1 lengths=$2 model=$3; shift 3
saved=checkpoints/$corpus/$(echo "$model $*" | sed 's/ --/./g; s/ *$//; s/ /_/g') clip=0.1
case $model in  # the paper clips no gradients of its vanilla Transformer
  transformer_lm) clip=0
    set -- --decoder-normalize-before --share-decoder-input-output-embed --decoder-learned-pos --no-scale-embedding \
      --activation-fn gelu --dropout 0 --decoder-layers 12 --decoder-embed-dim 768 --decoder-input-dim 768 \
      --decoder-output-dim 768 --decoder-ffn-embed-dim 3072 --decoder-attention-heads 12 "$@" ;;
  softmax_mlm) clip=0
    set -- --encoder-learned-pos --dropout 0 --attention-dropout 0 "$@" ;;
esac
task="--task language_modeling"
[ $corpus = c4 ] && task="--task masked_lm --criterion masked_lm"
data="work/flash/$corpus/data-bin --user-dir fairseq_plugin"
[ -f work/flash/$corpus/text.json ] || python -m recipes.flash.data $corpus
for n in $lengths; do
  fairseq-train $data $task --arch $model --tokens-per-sample $n --sample-break-mode none --max-tokens 8192 \
    --update-freq 4 --max-update 125000 --optimizer adam --adam-betas '(0.9, 0.999)' --adam-eps 1e-06 \
    --weight-decay 0.01 --clip-norm $clip --lr 0.0007 --lr-scheduler polynomial_decay --warmup-updates 10000 \
    --total-num-update 125000 --end-learning-rate 0 "$@" --save-dir $saved.$n
  if [ $corpus = c4 ]; then
    fairseq-validate $data $task --path $saved.$n/checkpoint_last.pt --max-tokens 8192
  else
    fairseq-eval-lm $data --path $saved.$n/checkpoint_last.pt --tokens-per-sample $n --sample-break-mode none \
      --max-tokens 8192
  fi
done
# The paper's perplexity of PG-19 is per word: that of fairseq-eval-lm to the power of the tokens in a word.
[ $corpus != pg19 ] || python -c "import json
documents, words, tokens = json.load(open('work/flash/pg19/text.json'))['counts']['test']
print(tokens / words)"
