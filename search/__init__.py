"""Finding factors: the curve, the genetic algorithm, the tasks, the scoring engine and the study."""
