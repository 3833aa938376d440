// Braces before the body of a constructor are no body.
namespace muond {

class Thing {
 public:
  Thing() : a_{1}, b_{2, 3} {
@{70 times}    a_ += 1;
  }
  int a_;
  int b_[2];
};

}  // namespace muond
