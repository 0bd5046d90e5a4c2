# A column of Flowformer's Table 7 on some of its data sets, or all nine, with three seeds:
#   sh recipes/offline_rl/train.sh flowformer hopper-medium-v2
set -e
model=$1; shift
budget="--criterion action_mse --clip-norm 0.25 --lr 0.001 --warmup-updates 10000 --max-update 100000"
[ $model = bc ] && budget="${budget}0"  # ten times the updates
[ $model = awac ] && budget="--criterion awac --lr 0.0003 --clip-norm 0 --max-update 1000000"
robots="halfcheetah hopper walker2d"
for dataset in ${@:-$(for kind in medium-expert medium medium-replay; do printf "%s-$kind-v2 " $robots; done)}; do
  [ -e work/offline_rl/$dataset/episodes.json ] || python -m recipes.offline_rl.data $dataset
  for seed in 1 2 3; do
    fairseq-train work/offline_rl/$dataset --user-dir fairseq_plugin --task offline_rl --arch ${model}_decision \
      --disable-validation --context 20 --batch-size 64 --optimizer adam --weight-decay 0.0001 --lr-scheduler fixed \
      $budget --seed $seed --save-dir checkpoints/d4rl/$model.$dataset.$seed
  done
  python -m recipes.offline_rl.evaluate checkpoints/d4rl/$model.$dataset.*/checkpoint_last.pt --episodes 100
done
