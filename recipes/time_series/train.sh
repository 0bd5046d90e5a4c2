# A column of Flowformer's Table 6 on some of its data sets, or all ten. Accuracy on the test series, of
# every second epoch and the best so far, is in the log of fairseq-train:
#   sh recipes/time_series/train.sh flowformer JapaneseVowels
set -e
model=$1; shift
for dataset in ${@:-EthanolConcentration FaceDetection Handwriting Heartbeat JapaneseVowels PEMS-SF SelfRegulationSCP1 \
  SelfRegulationSCP2 SpokenArabicDigits UWaveGestureLibrary}; do
  data=work/time_series/$dataset optimizer=radam epochs=100
  [ $dataset = SpokenArabicDigits ] && optimizer=adam  # both as in the authors' script
  [ $dataset = PEMS-SF ] && epochs=400
  [ -e $data/series.json ] || python -m recipes.time_series.data $dataset
  case $model in
    dtw | rocket | hist_gradient_boosting) python -m recipes.time_series.classify $data $model --seed 1 ;;
    *) fairseq-train $data --user-dir fairseq_plugin --task time_series_classification --criterion sentence_prediction \
      --arch ${model}_time_series --optimizer $optimizer --lr 0.001 --lr-scheduler fixed --clip-norm 4.0 \
      --batch-size 16 --required-batch-size-multiple 1 --max-epoch $epochs --valid-subset test --validate-interval 2 \
      --best-checkpoint-metric accuracy --maximize-best-checkpoint-metric --save-interval 10 --no-epoch-checkpoints \
      --data-buffer-size 0 --num-workers 0 --save-dir checkpoints/time_series/$model.$dataset ;;
  esac
done
