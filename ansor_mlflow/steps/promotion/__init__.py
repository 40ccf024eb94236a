"""The step `promote`: which version of a model is the champion."""

from ansor_mlflow.steps.promotion.contest import Promotion
from ansor_mlflow.steps.promotion.promote import Rollback, promote, rivals_of, roll_back
