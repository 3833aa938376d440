// One function of 71 lines after one of 70.
namespace muond {

@{1 times}
int Long(int x) {
@{69 times}  x += '{';
}

int Fits(int x) {
@{68 times}  x += 1;  // }
}

}  // namespace muond
