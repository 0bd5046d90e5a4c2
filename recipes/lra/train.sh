# A row of Flowformer's Tables 2, 10 and 11, from data to the test split, which is read once, on some of its tasks:
#   sh recipes/lra/train.sh "listops text retrieval image pathfinder" flowformer --flow-phi relu
set -e
tasks=$1 name=$2; shift 2
folder=checkpoints/lra/$(echo "$name $*" | sed 's/ --/./g; s/ *$//; s/ /_/g')
for task in $tasks; do  # all data before the first training: retrieval and pathfinder need the Arena's archive
  [ -e work/lra/$task/data-bin/label/dict.txt ] || python -m recipes.lra.data $task
done
for task in $tasks; do
  kind=sentence_prediction classes=2 first="--init-token 0" batch=32
  root="--weight-decay 0.1 --lr-scheduler inverse_sqrt" cosine="--lr-scheduler cosine"
  case $task in
    listops) classes=10 longest=2000
      schedule="$root --lr 1.58e-3 --warmup-updates 1000 --max-update 5000 --save-interval-updates 500" ;;
    text) longest=1001 schedule="$root --lr 5.59e-4 --warmup-updates 8000 --max-update 20000" ;;
    retrieval) kind=sequence_pair_prediction longest=4001
      schedule="$root --lr 5.59e-4 --warmup-updates 8000 --max-update 5000 --save-interval-updates 500" ;;
    image) classes=10 longest=1025 batch=256
      schedule="$cosine --lr 5e-4 --warmup-updates 175 --lr-period-updates 34825 --max-update 35000" ;;
    pathfinder) first= longest=1024 batch=512
      schedule="$cosine --lr 1e-3 --warmup-updates 312 --lr-period-updates 62088 --max-update 62400" ;;
  esac
  data="work/lra/$task/data-bin --user-dir fairseq_plugin --task $kind --num-classes $classes $first
    --criterion sentence_prediction --max-positions $longest --batch-size $batch"
  fairseq-train $data --arch ${name}_lra_$task "$@" --optimizer adam --adam-betas '(0.9, 0.98)' --adam-eps 1e-9 \
    $schedule --best-checkpoint-metric accuracy --maximize-best-checkpoint-metric --no-epoch-checkpoints \
    --save-dir $folder.$task
  fairseq-validate $data --path $folder.$task/checkpoint_best.pt --valid-subset test
done
