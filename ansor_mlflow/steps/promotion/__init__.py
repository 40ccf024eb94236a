"""The step `promote`: which version of a model is the champion."""

from ansor_mlflow.steps.promotion.decision import Promotion
from ansor_mlflow.steps.promotion.promote import promote, rivals_of
from ansor_mlflow.steps.promotion.rollback import Rollback, roll_back
